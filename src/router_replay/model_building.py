"""One thread at a time builds a transformers model: `with BUILDING: model = AutoModelForCausalLM.from_pretrained(...)`.

While it builds a model, transformers replaces functions of its own and of torch for the whole process, and puts back
what it found. Two threads that overlap put back each other's replacements: models that are built later from a config
are then not tied. An engine that returns to a pool is loaded in a thread of its own.
"""

from __future__ import annotations

import threading

BUILDING = threading.RLock()
