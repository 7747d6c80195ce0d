"""The project's C code: an optional extension module, its loader and self-test, and the library functions that it
calls.
"""
