"""Work on single instances of modules: binding methods to them, seeing hooks on them, and reporting what was done."""
