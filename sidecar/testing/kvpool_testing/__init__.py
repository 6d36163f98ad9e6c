"""Contract tests of Store and Index, test doubles and traffic generators. Part of no distribution; needs pytest."""
