//! A small Rust scanner: enough to tell code from comments, strings, chars and lifetimes.
//!
//! It yields tokens with their lines and never fails: an unclosed string or comment runs to the end of the
//! file, which the brace-balance test over the whole workspace would show.

/// The kind of a token; comments and blanks are not tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Identifier or keyword; a raw identifier keeps its `r#`.
    Word,
    /// A lifetime or loop label.
    Lifetime,
    /// String, char or number.
    Literal,
    /// One punctuation character.
    Mark,
}

/// One token and the lines that it covers, counted from 1.
#[derive(Debug, Clone, Copy)]
pub struct Token<'a> {
    /// Its kind.
    pub kind: Kind,
    /// Its text as written.
    pub text: &'a str,
    /// Line of its first character.
    pub line: usize,
    /// Line of its last character (differs only for strings over several lines).
    pub last_line: usize,
}

impl Token<'_> {
    /// Whether this is the keyword, identifier or mark `text`; a literal never is.
    pub fn is(&self, text: &str) -> bool {
        matches!(self.kind, Kind::Word | Kind::Mark) && self.text == text
    }
}

/// The tokens of `text` in order.
pub fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < text.len() {
        let rest = &text[at..];
        let (len, kind) = next(rest);
        let newlines = rest[..len].matches('\n').count();
        if let Some(kind) = kind {
            found.push(Token { kind, text: &rest[..len], line, last_line: line + newlines });
        }
        at += len;
        line += newlines;
    }
    found
}

/// Length in bytes of what `rest` starts with (at least one character), and its kind if it is a token.
fn next(rest: &str) -> (usize, Option<Kind>) {
    let first = rest.chars().next().expect("the caller stops at the end");
    if rest.starts_with("//") {
        (rest.find('\n').unwrap_or(rest.len()), None)
    } else if rest.starts_with("/*") {
        (block_comment(rest), None)
    } else if first.is_whitespace() {
        (first.len_utf8(), None)
    } else if let Some(len) = quoted(rest) {
        (len, Some(Kind::Literal))
    } else if first == '\'' {
        tick(rest)
    } else if first.is_ascii_digit() {
        (number(rest), Some(Kind::Literal))
    } else if first == '_' || first.is_alphabetic() {
        let skip = if rest.starts_with("r#") { 2 } else { 0 };
        (skip + word(&rest[skip..]), Some(Kind::Word))
    } else {
        (first.len_utf8(), Some(Kind::Mark))
    }
}

/// Length of a block comment; they nest.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        let here = &rest.as_bytes()[at..];
        if here.starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if here.starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
        } else {
            at += 1;
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// Length of a string or byte char with its prefix (`b`, `c`, `r`, `br`, `cr`, hashes), if `rest` is one.
fn quoted(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "b", "c", "r", ""].into_iter().find(|prefix| {
        let Some(after) = rest.strip_prefix(prefix) else { return false };
        if prefix.ends_with('r') {
            after.trim_start_matches('#').starts_with('"')
        } else {
            after.starts_with('"')
        }
    });
    match prefix {
        Some(p) if p.ends_with('r') => Some(raw_string(rest, p.len())),
        Some(p) => Some(p.len() + escaped(&rest[p.len()..], b'"')),
        None if rest.starts_with("b'") => Some(1 + escaped(&rest[1..], b'\'')),
        None => None,
    }
}

/// Length of a raw string whose hashes start at `prefix`.
fn raw_string(rest: &str, prefix: usize) -> usize {
    let hashes = rest[prefix..].bytes().take_while(|&b| b == b'#').count();
    let body = prefix + hashes + 1;
    let close = format!("\"{}", "#".repeat(hashes));
    rest[body..].find(&close).map_or(rest.len(), |at| body + at + close.len())
}

/// Length of a literal that `rest` opens and the byte `end` closes, a backslash taking the next byte along.
fn escaped(rest: &str, end: u8) -> usize {
    let bytes = rest.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b if b == end => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// A char literal or a lifetime. They differ in whether the character after the tick is closed at once.
fn tick(rest: &str) -> (usize, Option<Kind>) {
    let mut after = rest[1..].chars();
    let (first, second) = (after.next(), after.next());
    if first == Some('\\') || second == Some('\'') {
        let wide = first.map_or(0, char::len_utf8);
        let len = if first == Some('\\') { escaped(rest, b'\'') } else { 1 + wide + 1 };
        return (len, Some(Kind::Literal));
    }
    (1 + word(&rest[1..]), Some(Kind::Lifetime))
}

/// Length of a number, a suffix and one fraction included; a range such as `0..9` stays three tokens.
fn number(rest: &str) -> usize {
    let whole = word(rest);
    let mut after = rest[whole..].chars();
    match (after.next(), after.next()) {
        (Some('.'), Some(digit)) if digit.is_ascii_digit() => whole + 1 + word(&rest[whole + 1..]),
        _ => whole,
    }
}

/// Length of the run of identifier characters at the start of `rest`.
fn word(rest: &str) -> usize {
    rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<&str> {
        tokens(source).iter().map(|t| t.text).collect()
    }

    #[test]
    fn comments_are_not_code_and_block_comments_nest() {
        assert_eq!(texts("a // { b\n/* { /* { */ } */ c /// d\n"), ["a", "c"]);
    }

    #[test]
    fn strings_hide_braces_quotes_and_comments() {
        assert_eq!(texts(r#"x("a \" { // b", y)"#), ["x", "(", r#""a \" { // b""#, ",", "y", ")"]);
        assert_eq!(texts("r##\"a \"# { \"## z"), ["r##\"a \"# { \"##", "z"]);
        assert_eq!(texts("b\"{\\\"\" br#\"{\"# c\"{\" e"), ["b\"{\\\"\"", "br#\"{\"#", "c\"{\"", "e"]);
    }

    #[test]
    fn chars_and_lifetimes_are_told_apart() {
        let kinds: Vec<Kind> = tokens(r"'{' '\'' '\\' 'a 'é' b'\'' '_").iter().map(|t| t.kind).collect();
        use Kind::{Lifetime, Literal};
        assert_eq!(kinds, [Literal, Literal, Literal, Lifetime, Literal, Literal, Lifetime]);
        assert_eq!(texts("<'a,'b>('c','d')"), ["<", "'a", ",", "'b", ">", "(", "'c'", ",", "'d'", ")"]);
    }

    #[test]
    fn numbers_ranges_and_raw_words() {
        assert_eq!(
            texts("0..9 1.5f64 0x_ff r#fn x.0.y"),
            ["0", ".", ".", "9", "1.5f64", "0x_ff", "r#fn", "x", ".", "0", ".", "y"]
        );
    }

    #[test]
    fn lines_are_counted_through_strings_and_comments() {
        let source = "a\n\"b\nb\"\n/*\n*/ c";
        let lines: Vec<_> = tokens(source).iter().map(|t| (t.line, t.last_line)).collect();
        assert_eq!(lines, [(1, 1), (2, 3), (5, 5)]);
    }

    #[test]
    fn what_is_never_closed_runs_to_the_end() {
        assert_eq!(texts("a \"b }"), ["a", "\"b }"]);
        assert_eq!(texts("a /* b }"), ["a"]);
    }
}
