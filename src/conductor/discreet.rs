//! Error texts for clients: they describe the failure without addresses. Addresses appear only in the log.

use std::borrow::Cow;

/// The replacement for an address.
const SOMEWHERE: &str = "an engine";

/// The text without addresses of the inside: URLs, and hosts with a port.
pub(super) fn discreet(text: &str) -> Cow<'_, str> {
    if !text.split(' ').any(|word| is_address(bare(word))) {
        return Cow::Borrowed(text);
    }
    let words = text.split(' ').map(|word| match bare(word) {
        address if is_address(address) => Cow::Owned(word.replace(address, SOMEWHERE)),
        _ => Cow::Borrowed(word),
    });
    Cow::Owned(words.collect::<Vec<_>>().join(" "))
}

/// A word without what is written around it.
fn bare(word: &str) -> &str {
    let around = |c: char| {
        c.is_whitespace()
            || matches!(c, '"' | '\'' | '`' | '(' | ')' | '<' | '>' | ',' | ';' | ':' | '.' | '!' | '?')
    };
    word.trim_matches(around)
}

fn is_address(word: &str) -> bool {
    if word.contains("://") || word.parse::<std::net::SocketAddr>().is_ok() {
        return true;
    }
    let Some((host, port)) = word.rsplit_once(':') else { return word.parse::<std::net::IpAddr>().is_ok() };
    let of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let named = host.bytes().any(|byte| byte.is_ascii_alphabetic()) && host.bytes().all(of_name);
    named && (2..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_left_out_and_nothing_else() {
        for (text, told) in [
            (
                "connect: engine on 127.0.0.1:44805: refused; see its log",
                "connect: engine on an engine: refused; see its log",
            ),
            ("http://10.0.0.7:8000/v1/completions: status 500", "an engine: status 500"),
            ("(vllm-0.inner:8000, [::1]:99) broke", "(an engine, an engine) broke"),
            ("10.1.2.3 is gone", "an engine is gone"),
            ("p0 was lost: no heartbeat for 3.0 s", "p0 was lost: no heartbeat for 3.0 s"),
            ("at 12:30 row 4:2 of x: y", "at 12:30 row 4:2 of x: y"),
            ("", ""),
        ] {
            assert_eq!(discreet(text), told);
        }
    }
}
