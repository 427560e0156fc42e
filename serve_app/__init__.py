"""The application on Ray Serve: HTTP, OpenAI's protocol, deployments, placement."""
