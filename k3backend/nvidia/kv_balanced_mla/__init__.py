"""The balanced MLA decode on NVIDIA: ``core`` without a framework, ``decode`` for one MLA layer."""
