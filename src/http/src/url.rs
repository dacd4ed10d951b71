//! The address of a server, as people and settings give it.

use http::Uri;
use http::uri::{InvalidUri, Scheme};

/// An `http://` or `https://` URL with a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url(Uri);

/// The defect of an address.
#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    /// It cannot be read.
    #[error("no URL: {0}")]
    Unread(InvalidUri),
    /// It begins with something else.
    #[error("no URL that begins with http:// or https://")]
    Scheme,
    /// There is nothing where the host should be.
    #[error("it names no host")]
    NoHost,
}

impl Url {
    /// Reads `text`.
    ///
    /// # Errors
    /// When it is no such URL.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let uri: Uri = text.parse().map_err(UrlError::Unread)?;
        if ![Some(&Scheme::HTTP), Some(&Scheme::HTTPS)].contains(&uri.scheme()) {
            return Err(UrlError::Scheme);
        }
        if uri.host().is_none_or(str::is_empty) {
            return Err(UrlError::NoHost);
        }
        Ok(Self(uri))
    }

    /// Whether it begins with `https://`.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.0.scheme() == Some(&Scheme::HTTPS)
    }

    /// Its host; an address of IPv6 without its brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        bare_host(&self.0)
    }

    /// Scheme, host and port.
    #[must_use]
    pub fn base(&self) -> String {
        format!("{}://{}", self.0.scheme_str().unwrap_or_default(), self.authority())
    }

    /// Where an API begins whose clients are given URLs with or without a trailing `/v1`.
    #[must_use]
    pub fn api_base(&self) -> String {
        let path = self.0.path().trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/');
        format!("{}{path}", self.base())
    }

    /// The base URL, with `port` where this URL names none.
    #[must_use]
    pub fn base_at(&self, port: u16) -> String {
        match self.0.port() {
            Some(_) => self.base(),
            None => format!("{}:{port}", self.base()),
        }
    }

    /// All of it.
    #[must_use]
    pub fn uri(&self) -> &Uri {
        &self.0
    }

    fn authority(&self) -> &str {
        self.0.authority().map_or("", |authority| authority.as_str())
    }
}

/// The host of `uri`; an address of IPv6 without its brackets.
pub(crate) fn bare_host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    #[test]
    fn what_is_no_url_of_a_server_is_refused() {
        for (text, why) in [
            ("", "no URL: "),
            ("h:8000", "begins with"),
            ("/admin", "begins with"),
            ("ftp://h", "begins with"),
            ("http://", "no URL: "),
            ("http://:80", "no host"),
        ] {
            let error = Url::parse(text).err().unwrap_or_else(|| panic!("{text} was taken")).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn ports_and_bracketed_addresses_are_understood() {
        let (plain, secure) = (url("http://[::1]/x?y"), url("https://h:81"));
        assert_eq!((plain.host(), secure.host()), ("::1", "h"));
        assert_eq!((plain.is_secure(), secure.is_secure()), (false, true));
        assert_eq!((plain.base(), secure.base()), ("http://[::1]".into(), "https://h:81".into()));
        assert_eq!(
            (plain.base_at(80), secure.base_at(80)),
            ("http://[::1]:80".into(), "https://h:81".into())
        );
        assert_eq!((plain.uri().path(), plain.uri().query()), ("/x", Some("y")));
    }

    #[test]
    fn the_version_of_an_api_is_no_part_of_where_it_begins() {
        for text in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            assert_eq!(url(text).api_base(), "http://h:1");
        }
        assert_eq!(url("https://h/a/v1").api_base(), "https://h/a");
    }
}
