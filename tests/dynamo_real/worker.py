"""Start Dynamo's own vLLM worker (`python -m dynamo.vllm`) on a machine without torchvision.

At start, `dynamo.vllm` imports one function for the images of Qwen-VL from a transformers module that needs
torchvision, of which only CUDA builds are on PyPI. A stub takes the place of that module; nothing calls it here.
"""

from __future__ import annotations

import runpy
import sys
import types

IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"

if __name__ == "__main__":
    stub = types.ModuleType(IMAGES)
    stub.smart_resize = None  # type: ignore[attr-defined]
    sys.modules[IMAGES] = stub
    runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)
