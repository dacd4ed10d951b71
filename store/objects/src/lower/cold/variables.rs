//! Environment variables of a bucket's service. They are checked as a whole before the first request.
//!
//! The client that speaks to the bucket puts these values into addresses and headers as they are, and ends the thread
//! that it runs on where they do not fit.

use std::collections::BTreeMap;
use std::ffi::OsString;

use object_store::aws::AmazonS3ConfigKey as Setting;

/// Longest value: tokens have about a thousand bytes, and an address of more than 65,534 is none.
const VALUE_BYTES_MAX: usize = 16 << 10;

/// The `AWS_` variables that mean something to the client, none of them empty.
#[derive(Debug, Default)]
pub(super) struct Variables {
    known: BTreeMap<String, String>,
}

impl Variables {
    /// Those of an environment. An empty one counts as none, as it does for other programs.
    ///
    /// # Errors
    /// Names the variable that cannot be what it is for; never what it says, where that is a secret.
    pub(super) fn read(environment: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, String> {
        let mut known = BTreeMap::new();
        for (name, value) in environment {
            let Some(name) = name.to_str().filter(|name| name.starts_with("AWS_")) else { continue };
            let Some(setting) = setting(name) else { continue };
            if value.is_empty() {
                continue;
            }
            let value = value.to_str().ok_or_else(|| format!("cold: {name} is no text; set it anew"))?;
            check(name, setting, value)?;
            known.insert(name.to_owned(), value.to_owned());
        }
        Ok(Self { known })
    }

    /// The value of a variable.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.known.get(name).cloned()
    }

    /// The setting and value of each variable, in the order of their names.
    pub(super) fn settings(&self) -> impl Iterator<Item = (Setting, &str)> {
        self.known.iter().filter_map(|(name, value)| Some((setting(name)?, value.as_str())))
    }
}

fn setting(name: &str) -> Option<Setting> {
    name.to_ascii_lowercase().parse().ok()
}

/// Whether this can be the address of a service.
pub(super) fn is_address(text: &str) -> bool {
    let uri: Option<http::Uri> = text.parse().ok();
    uri.is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host() != Some(""))
}

fn check(name: &str, setting: Setting, value: &str) -> Result<(), String> {
    if value.len() > VALUE_BYTES_MAX {
        let bytes = value.len();
        return Err(format!(
            "cold: {name} has {bytes} bytes, at most {VALUE_BYTES_MAX}; set it as it was given"
        ));
    }
    let word = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let (fits, wanted) = match setting {
        Setting::Region | Setting::DefaultRegion => {
            (value.chars().all(word), "a region is a word like us-east-1")
        }
        Setting::AccessKeyId | Setting::SecretAccessKey | Setting::Token => {
            let fits = value.chars().all(|c| c.is_ascii_graphic());
            return fits.then_some(()).ok_or_else(|| {
                format!("cold: {name} has blanks or characters that no key has; set it as it was given")
            });
        }
        Setting::MetadataEndpoint | Setting::StsEndpoint | Setting::ContainerCredentialsFullUri => {
            (is_address(value), "give an address like http://127.0.0.1:9000")
        }
        Setting::ContainerCredentialsRelativeUri => {
            let whole = format!("http://169.254.170.2{value}");
            (value.starts_with('/') && is_address(&whole), "give a path like /v2/credentials")
        }
        // The one in use is looked at with what the command line says.
        Setting::Endpoint | Setting::S3Endpoint => (true, ""),
        Setting::WebIdentityTokenFile | Setting::ContainerAuthorizationTokenFile => (true, ""),
        _ => (value.chars().all(|c| c == ' ' || c.is_ascii_graphic()), "set it in plain characters"),
    };
    fits.then_some(()).ok_or_else(|| format!("cold: {name} cannot be {value:?}; {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt as _;

    fn read(variables: &[(&str, &str)]) -> Result<Variables, String> {
        Variables::read(variables.iter().map(|(name, value)| ((*name).into(), (*value).into())))
    }

    #[test]
    fn what_fits_is_handed_on_and_what_is_empty_or_unknown_is_not() {
        let variables = read(&[
            ("AWS_REGION", "eu-central-1"),
            ("AWS_SECRET_ACCESS_KEY", "a/b+c=="),
            ("AWS_SESSION_TOKEN", ""),
            ("AWS_ENDPOINT_URL", ""),
            ("AWS_NO_SUCH_THING", "a b\n"),
            ("HOME", "ä b"),
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/etc/schlüssel 1"),
        ])
        .unwrap();
        assert_eq!((variables.get("AWS_ENDPOINT_URL"), variables.get("HOME")), (None, None));
        let settings: Vec<(Setting, &str)> = variables.settings().collect();
        assert_eq!(
            settings,
            [
                (Setting::Region, "eu-central-1"),
                (Setting::SecretAccessKey, "a/b+c=="),
                (Setting::WebIdentityTokenFile, "/etc/schlüssel 1"),
            ]
        );
    }

    #[test]
    fn what_would_end_the_clients_thread_is_refused_by_name() {
        for (name, value) in [
            ("AWS_REGION", "a b"),
            ("AWS_REGION", "eu/central"),
            ("AWS_DEFAULT_REGION", "us-east-1\n"),
            ("AWS_REGION", "münchen"),
            ("AWS_METADATA_ENDPOINT", "nonsense"),
            ("AWS_ENDPOINT_URL_STS", "http://a b"),
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "/credentials"),
            ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "v2"),
            ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v 2"),
            ("AWS_SSE_KMS_KEY_ID", "a\nb"),
        ] {
            let why = read(&[(name, value)]).unwrap_err();
            assert!(why.starts_with(&format!("cold: {name} cannot be {value:?}; ")), "{why}");
        }
        let long = "a".repeat(70_000);
        assert!(read(&[("AWS_REGION", &long)]).is_err_and(|why| why.contains("AWS_REGION has 70000 bytes")));
        let no_text = ("AWS_REGION".into(), OsString::from_vec(vec![0xff]));
        assert!(Variables::read([no_text]).is_err_and(|why| why.contains("AWS_REGION is no text")));
    }

    #[test]
    fn a_secret_that_cannot_be_one_is_named_and_not_told() {
        for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN"] {
            for secret in ["two words", "geheim-ß", "line\n", " padded"] {
                let why = read(&[(name, secret)]).unwrap_err();
                assert!(why.contains(name) && !why.contains(secret.trim()), "{why}");
            }
        }
    }
}
