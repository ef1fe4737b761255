"""OpenAI's protocol: models, completions, chat completions."""
