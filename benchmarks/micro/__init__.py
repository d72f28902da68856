"""Small kernels that measure what the cost model's table says of an SM.

`python -m hopwell.benchmarks.micro [--out FILE]` runs all of them on this machine's GPU and prints
JSON. Each is PTX text with clock reads in it, made by `kernels`; the emulator runs the same text,
for correctness alone.
"""
