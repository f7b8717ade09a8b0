"""The programs that Meshwright is compared with, each a module that torchrun starts: `... -m meshwright.benchmarks.peers.ddp MODEL`."""
