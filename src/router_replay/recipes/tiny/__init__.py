"""The tiny Qwen3-MoE: its recipe (`model`), its training (`warm_start`, `data`), its files (`ready/`), and a demo."""
