"""Images and sounds of requests: bounded before they are decoded, decoded by processes of their own, cut into patches
and frames."""
