"""What the vendors share: specs, grouping, layout, the split plan, the reference and kernels.

Imports the standard library, numpy and torch only (triton under ``common/kernels``); never a
vendor, the dispatcher, vllm or aiter.
"""
