"""Parts that the plug-ins share; none of them imports an engine."""
