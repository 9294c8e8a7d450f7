"""Places requests of an Envoy gateway: the endpoint picker protocol."""
