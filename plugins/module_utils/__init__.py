"""Pure functions shared by modules, filters, scripts and the host program. Standard library, Python 3.9 and newer."""
