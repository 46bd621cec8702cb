"""The values of quality that rules can use."""

VALUE_NAMES = {
    "label.answers": "answers of people in the queue",
    "label.agreement": "share of equal pairs among people's answers to one item",
    "label.alpha": "Krippendorff's alpha of people's answers, nominal",
    "label.gold_accuracy": "share of gold items that people answered right",
    "label.alarms": "alarms of the quality report",
}
"""Names of values in the rules of triggers and gates; they are not numbers where nothing is measured."""
