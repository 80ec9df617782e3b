"""Sites that an episode may be about. A site keeps its state on the server, where the verifier reads it."""

from random import Random

from skyrl_gym.envs.browser.sites.base import Site
from skyrl_gym.envs.browser.sites.books import BooksSite
from skyrl_gym.envs.browser.sites.button import ButtonSite
from skyrl_gym.envs.browser.sites.registration import RegistrationSite
from skyrl_gym.envs.browser.sites.shop import ShopSite

SITES: dict[str, type[Site]] = {
    "button": ButtonSite,
    "registration": RegistrationSite,
    "books": BooksSite,
    "shop": ShopSite,
}


def make_site(name: str, seed: int) -> Site:
    """Return a site with the content and the task of a seed. Raise ValueError for an unknown name."""
    if name not in SITES:
        raise ValueError(f"site={name!r} is unknown; use one of {', '.join(SITES)}")
    return SITES[name](Random(f"{name}-{seed}"))
