"""The rocline command: one file a subcommand; it formats what the folders below compute."""
