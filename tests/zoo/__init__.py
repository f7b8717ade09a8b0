"""A sweep over many architectures: each compiled for several meshes, run on real ranks, compared with one process.

`python -m meshwright.tests.zoo --help`. The models come from `zoo.py` in the shared folder beside the repository.
"""
