"""A cluster in virtual time, driven by the policies that engines and router call."""
