"""The parts of the fake engine that have no counterpart in the real one."""
