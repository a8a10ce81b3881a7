"""Triton bodies that every vendor launches unchanged. The only part of common that needs triton."""
