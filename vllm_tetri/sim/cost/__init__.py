"""What steps take: profiles of devices and models."""
