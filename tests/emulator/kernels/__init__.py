"""Kernels for the emulator's tests; none of them has anything to do with attention.

Each module holds CuTe DSL kernels and, beside them, what they should compute in NumPy terms.
"""
