//! Rules that give a call its class where neither a header nor `service_tier` names one: by tenant, by model, and by the
//! body's `priority`.

use std::sync::Arc;

use parking_lot::RwLock;
use serde_json::value::RawValue;

use crate::error::ApiError;

/// A rule: calls that are as all of its fields say have its class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassRule {
    /// The tenant, of the API key or of `x-tenant-id`.
    pub tenant: Option<String>,
    /// The model that is asked for; where the client leaves it open, the one that is served.
    pub model: Option<String>,
    /// The body's `priority`.
    pub priority: Option<i64>,
    /// The class.
    pub class: Arc<str>,
}

/// Rules and the names of all classes, as one state.
#[derive(Debug, Default)]
pub(crate) struct RuleTable {
    rules: Vec<ClassRule>,
    classes: Vec<Arc<str>>,
}

/// A list of rules that may change while the router serves. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct ClassRules(Arc<RwLock<Arc<RuleTable>>>);

impl ClassRules {
    /// Replaces the list; `classes` are the names of all classes that there are.
    pub fn set(&self, rules: Vec<ClassRule>, classes: Vec<Arc<str>>) {
        *self.0.write() = Arc::new(RuleTable { rules, classes });
    }

    /// The list as it is now.
    pub(crate) fn now(&self) -> Arc<RuleTable> {
        Arc::clone(&self.0.read())
    }
}

/// A class, and the field of the body that chose it.
pub(crate) type ClassChoice = (Arc<str>, Option<&'static str>);

/// A call, as rules see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RuledCall<'c> {
    pub(crate) tenant: Option<&'c str>,
    pub(crate) model: &'c str,
    pub(crate) priority: Option<i64>,
}

impl ClassRule {
    /// Whether it is about such calls, whatever their priority.
    fn is_about(&self, call: &RuledCall<'_>) -> bool {
        let fits = |wanted: &Option<String>, is: Option<&str>| {
            wanted.as_deref().is_none_or(|wanted| is == Some(wanted))
        };
        fits(&self.tenant, call.tenant) && fits(&self.model, Some(call.model))
    }
}

impl RuleTable {
    /// Whether one of the API's own tiers is only that here: with rules, it leaves the class to them.
    pub(crate) fn leaves_open(&self, tier: &str) -> bool {
        !self.rules.is_empty() && self.classes.iter().all(|class| **class != *tier)
    }

    /// The class of a call by the first rule that it meets, and the field that chose it. A key that may not use the class
    /// (`may_use` says so) is refused where its client named the priority, and the rule is passed over where it did not.
    ///
    /// # Errors
    /// The key may not use the class, or no rule is about this priority.
    pub(crate) fn class_of(
        &self,
        call: &RuledCall<'_>,
        may_use: impl Fn(&str) -> Result<(), ApiError>,
    ) -> Result<Option<ClassChoice>, ApiError> {
        for rule in self.rules.iter().filter(|rule| rule.is_about(call)) {
            match rule.priority {
                Some(priority) if call.priority == Some(priority) => {
                    may_use(&rule.class).map_err(|error| ApiError { param: Some(PRIORITY), ..error })?;
                    return Ok(Some((Arc::clone(&rule.class), Some(PRIORITY))));
                }
                None if may_use(&rule.class).is_ok() => return Ok(Some((Arc::clone(&rule.class), None))),
                _ => {}
            }
        }
        Ok(None)
    }

    /// Refuses a priority that no rule for such calls is about; 0 asks for nothing.
    pub(crate) fn check_priority(&self, call: &RuledCall<'_>) -> Result<(), ApiError> {
        let Some(asked) = call.priority.filter(|priority| *priority != 0) else { return Ok(()) };
        let mut there: Vec<i64> =
            self.rules.iter().filter(|rule| rule.is_about(call)).filter_map(|rule| rule.priority).collect();
        if there.contains(&asked) {
            return Ok(());
        }
        there.sort_unstable();
        there.dedup();
        let there: Vec<String> = there.iter().map(i64::to_string).collect();
        let message = match there.as_slice() {
            [] => format!("{PRIORITY} is not served here: use service_tier or the header x-slo-class"),
            _ => {
                format!("{PRIORITY} {asked} is not served here; there are classes for: {}", there.join(", "))
            }
        };
        Err(ApiError::invalid(PRIORITY, message).code("unsupported_parameter"))
    }
}

const PRIORITY: &str = "priority";

/// The number in the body's `priority`. Null, false and nothing are as if it were not there.
pub(crate) fn priority(value: Option<&RawValue>) -> Result<Option<i64>, ApiError> {
    let Some(text) = value.map(|value| value.get()) else { return Ok(None) };
    if matches!(text, "null" | "false" | "\"\"" | "[]" | "{}") {
        return Ok(None);
    }
    match text.parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => {
            let message = format!("{PRIORITY} is a whole number; leave it out, or use service_tier");
            Err(ApiError::invalid(PRIORITY, message).code("unsupported_parameter"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(tenant: Option<&str>, model: Option<&str>, priority: Option<i64>, class: &str) -> ClassRule {
        let name = |name: Option<&str>| name.map(str::to_owned);
        ClassRule { tenant: name(tenant), model: name(model), priority, class: class.into() }
    }

    fn table(rules: &[ClassRule]) -> RuleTable {
        RuleTable { rules: rules.to_vec(), classes: vec!["first".into(), "flex".into()] }
    }

    fn call(tenant: Option<&'static str>, model: &'static str, priority: Option<i64>) -> RuledCall<'static> {
        RuledCall { tenant, model, priority }
    }

    #[test]
    fn the_first_rule_whose_fields_all_match_gives_the_class() {
        let table = table(&[
            rule(Some("acme"), Some("small"), None, "a"),
            rule(Some("acme"), None, Some(5), "b"),
            rule(None, Some("small"), None, "c"),
            rule(None, None, Some(5), "d"),
        ]);
        let class = |call: RuledCall<'_>| {
            let found = table.class_of(&call, |_| Ok(())).unwrap();
            found.map(|(class, param)| (class.to_string(), param))
        };
        let plain = |name: &str| Some((name.to_owned(), None));
        let by_priority = |name: &str| Some((name.to_owned(), Some("priority")));
        assert_eq!(class(call(Some("acme"), "small", Some(5))), plain("a"), "earlier rules go first");
        assert_eq!(class(call(Some("acme"), "large", Some(5))), by_priority("b"));
        assert_eq!(class(call(Some("acme"), "large", None)), None);
        assert_eq!(class(call(Some("other"), "small", Some(5))), plain("c"));
        assert_eq!(class(call(None, "large", Some(5))), by_priority("d"));
        assert_eq!(class(call(None, "large", Some(6))), None);
    }

    #[test]
    fn a_rule_that_the_key_may_not_use_is_refused_by_priority_alone() {
        let no = |class: &str| if class == "c" { Ok(()) } else { Err(ApiError::new(403, "not you")) };
        let table = table(&[
            rule(Some("acme"), None, None, "a"),
            rule(None, None, Some(5), "b"),
            rule(None, Some("m"), None, "c"),
        ]);
        let error = table.class_of(&call(Some("acme"), "m", Some(5)), no).unwrap_err();
        assert_eq!((error.status, error.param), (403, Some("priority")));
        let found = table.class_of(&call(Some("acme"), "m", None), no).unwrap();
        assert_eq!(
            found.map(|(class, _)| class.to_string()).as_deref(),
            Some("c"),
            "the others are passed over"
        );
    }

    #[test]
    fn a_priority_without_a_rule_is_refused_with_those_that_there_are() {
        let table = table(&[
            rule(None, None, Some(7), "b"),
            rule(None, None, Some(-1), "b"),
            rule(Some("acme"), None, Some(9), "b"),
        ]);
        let said =
            |table: &RuleTable, call| table.check_priority(&call).map_err(|error| error.message.into_owned());
        assert_eq!(said(&table, call(None, "m", Some(7))), Ok(()));
        assert_eq!(said(&table, call(Some("acme"), "m", Some(9))), Ok(()));
        assert!(
            said(&table, call(None, "m", Some(9))).unwrap_err().ends_with("there are classes for: -1, 7")
        );
        for asks_nothing in [None, Some(0)] {
            assert_eq!(said(&table, call(None, "m", asks_nothing)), Ok(()));
        }
        let none = said(&RuleTable::default(), call(None, "m", Some(3))).unwrap_err();
        assert!(none.contains("service_tier") && none.contains("x-slo-class"), "{none}");
    }

    #[test]
    fn a_priority_is_a_whole_number_or_nothing() {
        let read = |text: &str| {
            let value = RawValue::from_string(text.to_owned()).unwrap();
            priority(Some(&value)).map_err(|error| (error.status, error.param))
        };
        assert_eq!(priority(None).unwrap(), None);
        assert_eq!(
            (read("-3"), read("0"), read("null"), read("false")),
            (Ok(Some(-3)), Ok(Some(0)), Ok(None), Ok(None))
        );
        for wrong in ["\"high\"", "1.0", "1.5", "true", "[1]", "99999999999999999999"] {
            assert_eq!(read(wrong), Err((400, Some("priority"))), "{wrong}");
        }
    }

    #[test]
    fn tiers_of_the_api_leave_the_class_to_the_rules_unless_a_class_has_that_name() {
        let table = table(&[rule(Some("acme"), None, None, "a")]);
        assert!(table.leaves_open("priority") && !table.leaves_open("flex"));
        assert!(!RuleTable::default().leaves_open("priority"), "without rules the conductor knows");
    }
}
