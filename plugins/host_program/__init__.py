"""The program that runs on a host: the only place that starts or stops an engine. Standard library only."""
