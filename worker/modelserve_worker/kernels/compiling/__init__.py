"""How kernels are compiled, kept on disk and launched, whatever they compute."""
