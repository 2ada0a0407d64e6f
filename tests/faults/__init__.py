"""The fault matrix: what the swap on a host does when something breaks, on a real systemd over real SSH."""
