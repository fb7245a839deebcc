"""The store connector on Mooncake Store: not built yet, so this room has no door."""
