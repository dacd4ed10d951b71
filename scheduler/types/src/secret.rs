//! A value that programs use and nobody reads.

use alloc::string::String;
use core::convert::Infallible;
use core::fmt;
use core::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Shown in place of a secret.
const HIDDEN: &str = "(hidden)";

/// A key, password or seed. It has no `Display`; `Debug` and serialising show `(hidden)`, or the default where nothing
/// was set, so a configuration that holds one can be logged, compared and sent as a whole. An error about a value that
/// does not fit shows no part of it.
#[derive(Clone, Default, PartialEq, Eq, JsonSchema)]
pub struct Secret<T>(T);

impl<T> Secret<T> {
    /// Hides `value`.
    pub const fn new(value: T) -> Self {
        Self(value)
    }

    /// The value itself, for the one place that proves or checks it.
    pub const fn expose(&self) -> &T {
        &self.0
    }
}

impl<T: Default + PartialEq> Secret<T> {
    /// Whether it differs from the default, which stands for "none".
    pub fn is_set(&self) -> bool {
        self.0 != T::default()
    }
}

impl From<&str> for Secret<String> {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl FromStr for Secret<String> {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self::from(text))
    }
}

impl<T: Default + PartialEq> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { HIDDEN } else { "(none)" })
    }
}

impl<T: Default + PartialEq + Serialize> Serialize for Secret<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.is_set() { serializer.serialize_str(HIDDEN) } else { self.0.serialize(serializer) }
    }
}

impl<'de> Deserialize<'de> for Secret<String> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from).map_err(|_| de::Error::custom("a secret must be a string"))?;
        // Output with hidden secrets that is used as input must not make a key that everybody knows.
        if text == HIDDEN {
            return Err(de::Error::custom("\"(hidden)\" stands for a secret; give the secret itself"));
        }
        Ok(Self(text))
    }
}

impl<'de> Deserialize<'de> for Secret<u64> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let seed = u64::deserialize(from);
        seed.map(Self).map_err(|_| de::Error::custom("a secret seed must be an integer of at least 0"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, I64Deserializer, StrDeserializer, StringDeserializer, U64Deserializer};

    /// A serializer of single values: `fmt::Formatter` is one, so the formatter of `format!` serves.
    struct Text<T>(T);

    impl<T: Serialize> fmt::Display for Text<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.serialize(f)
        }
    }

    #[test]
    fn nothing_that_prints_shows_a_secret() {
        let (key, seed) = (Secret::from("sesame"), Secret::new(123_456_789_u64));
        for shown in [
            format!("{key:?}"),
            format!("{key:#?}"),
            format!("{seed:?}"),
            format!("{}", Text(&key)),
            format!("{}", Text(&seed)),
        ] {
            assert_eq!(shown, HIDDEN);
        }
        assert_eq!((key.expose().as_str(), *seed.expose()), ("sesame", 123_456_789));
        assert!(key.is_set() && seed.is_set());
    }

    #[test]
    fn a_secret_that_was_not_set_serialises_as_its_default() {
        let (key, seed) = (Secret::<String>::default(), Secret::<u64>::default());
        assert_eq!(format!("{}", Text(&key)), "");
        assert_eq!(format!("{}", Text(&seed)), "0");
        assert_eq!((format!("{key:?}"), format!("{seed:?}")), ("(none)".into(), "(none)".into()));
        assert!(!key.is_set() && !seed.is_set());
    }

    #[test]
    fn values_of_another_kind_are_refused_without_being_shown() {
        let text: StringDeserializer<Error> = String::from("sesame").into_deserializer();
        assert_eq!(Secret::<String>::deserialize(text), Ok(Secret::from("sesame")));
        let number: U64Deserializer<Error> = 77_u64.into_deserializer();
        assert_eq!(Secret::<u64>::deserialize(number), Ok(Secret::new(77)));
        let number: U64Deserializer<Error> = 4711_u64.into_deserializer();
        let error = Secret::<String>::deserialize(number).expect_err("a number");
        assert!(!format!("{error}").contains("4711"), "{error}");
        let negative: I64Deserializer<Error> = (-4711_i64).into_deserializer();
        let error = Secret::<u64>::deserialize(negative).expect_err("below 0");
        assert!(!format!("{error}").contains("4711"), "{error}");
        let text: StrDeserializer<'_, Error> = "sesame".into_deserializer();
        let error = Secret::<u64>::deserialize(text).expect_err("a string");
        assert!(!format!("{error}").contains("sesame"), "{error}");
    }

    #[test]
    fn what_stands_for_a_secret_is_not_taken_for_one() {
        let text: StrDeserializer<'_, Error> = HIDDEN.into_deserializer();
        let error = Secret::<String>::deserialize(text).expect_err("not a key");
        assert!(format!("{error}").contains("give the secret itself"), "{error}");
    }
}
