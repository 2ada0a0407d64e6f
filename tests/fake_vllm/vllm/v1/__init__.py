"""Module of the fake engine at the place where the real engine has it."""
