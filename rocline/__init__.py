"""rocline: serves DeepSeek-V4.1-Flash from its released checkpoint on eight gfx1100 cards."""
