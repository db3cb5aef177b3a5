"""Examples for grain's worker processes, which import this module: it imports no other."""


class Ids:
    """Hold examples with access by index, as grain reads them."""

    def __init__(self, count=10):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"id": index}

    def __repr__(self):
        return "Ids()"
