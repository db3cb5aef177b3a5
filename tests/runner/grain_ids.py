"""Ten examples for grain's worker processes, which import this module: it imports no other."""


class Ids:
    """Hold ten examples with access by index, as grain reads them."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"id": index}

    def __repr__(self):
        return "Ids()"
