"""A GPU on host memory: `device` (FakeDevice), its `memory` and `streams`, the `order` audit of copies."""
