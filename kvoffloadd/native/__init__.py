"""The project's C code: an optional extension module, how it is loaded and tested, and what it calls."""
