"""A Triton backend named "cpu" that compiles nothing.

vLLM for CPUs runs Model Runner V2 only if Triton has a backend named "cpu". No package on PyPI has one for the ordinary
Triton wheel. With TRITON_INTERPRET=1, Triton runs kernels in its interpreter (NumPy) and never compiles, so a backend
that only answers questions about the device is enough. Without that variable, the first kernel raises.
"""
