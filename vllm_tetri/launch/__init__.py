"""Starting, watching and stopping a cluster on one machine."""
