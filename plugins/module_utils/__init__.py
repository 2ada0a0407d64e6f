"""Pure functions shared by modules, filters, scripts and the host program. Standard library only, Python 3.9 and newer."""
