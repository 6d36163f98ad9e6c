"""Engine plug-ins; each imports its engine lazily."""
