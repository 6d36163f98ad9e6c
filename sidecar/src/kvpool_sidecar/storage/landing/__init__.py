"""Landing zone: memory files that engines write before their bytes reach a drive."""
