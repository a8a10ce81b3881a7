"""The balanced MLA decode on ROCm: ``core`` without a framework, ``decode`` for one MLA layer."""
