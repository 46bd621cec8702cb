"""The config section ``label.quality``, and the values of quality that rules can use."""

from pydantic import Field

from posttrain.store.section import Section

VALUE_NAMES = {
    "label.answers": "answers of people in the queue",
    "label.agreement": "share of equal pairs among people's answers to one item",
    "label.alpha": "Krippendorff's alpha of people's answers, nominal",
    "label.gold_accuracy": "share of gold items that people answered right",
    "label.alarms": "alarms of the quality report",
}
"""Names of values in the rules of triggers and gates; they are not numbers where nothing is measured."""


class Price(Section):
    """The price of an annotator's work."""

    per_hour: float = Field(0.0, ge=0, description="Price of an hour.")
    per_label: float = Field(0.0, ge=0, description="Price of a label, on top of the hours.")


class QualityConfig(Section):
    """Prices, the budget in money, and how often honest annotators may raise a false alarm."""

    price: Price = Field(Price(), description="The price of the work of annotators without one of their own.")
    prices: dict[str, Price] = Field({}, description="Prices by annotator.")
    budget: float | None = Field(None, ge=0, description="Budget for labels, in the unit of the prices; null: none.")
    false_alarms: float = Field(
        0.05, gt=0, lt=1, description="Chance that a report on honest annotators has any alarm."
    )
    draws: int = Field(1000, ge=0, description="Bootstrap samples of the intervals of agreement; 0: no intervals.")

    def price_of(self, annotator: str) -> Price:
        """Returns the price of an annotator's work."""
        return self.prices.get(annotator, self.price)
