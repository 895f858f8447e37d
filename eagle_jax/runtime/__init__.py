"""What a caller holds: targets, drafters, requests, generation, sessions, profiles."""
