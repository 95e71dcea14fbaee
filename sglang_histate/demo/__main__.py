"""``python -m sglang_histate.demo`` builds the demo model if needed and prints its folder."""

from sglang_histate.demo.cache import ensure_demo_model

if __name__ == "__main__":
    print(ensure_demo_model())
