//! Outline of a Rust source: functions, types, modules, and which lines are test code.

use crate::lex::{Kind, Token, tokens};
use std::ops::RangeInclusive;

/// One function with a body or a signature.
#[derive(Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Line of its `fn`.
    pub line: usize,
    /// Line of its closing brace, or of its `;` where it has no body.
    pub last_line: usize,
    /// Parameters, `self` included.
    pub parameters: usize,
    /// Whether it stands in `impl Trait for Type`, where the trait chose the signature.
    pub of_a_trait: bool,
    /// Whether it is test code.
    pub test: bool,
}

/// One struct, enum, trait, union or type alias.
#[derive(Debug)]
pub struct TypeName {
    /// Its name.
    pub name: String,
    /// Its line.
    pub line: usize,
}

/// One `mod name;`, whose body is another file.
#[derive(Debug)]
pub struct Module {
    /// Its name.
    pub name: String,
    /// Inline modules around it, outermost first.
    pub inside: Vec<String>,
    /// The path attribute, if there is one.
    pub path: Option<String>,
    /// Whether it is compiled for tests only.
    pub test: bool,
}

/// The declarations of one source.
pub struct Outline<'a> {
    /// All tokens.
    pub tokens: Vec<Token<'a>>,
    /// Token ranges that are compiled for tests only.
    test_tokens: Vec<RangeInclusive<usize>>,
    /// Lines in the text.
    pub lines: usize,
}

impl<'a> Outline<'a> {
    /// Reads `text`.
    pub fn of(text: &'a str) -> Self {
        let tokens = tokens(text);
        let test_tokens = test_ranges(&tokens);
        Self { tokens, test_tokens, lines: text.lines().count() }
    }

    /// Whether the token at `at` is compiled for tests only.
    pub fn is_test(&self, at: usize) -> bool {
        self.test_tokens.iter().any(|range| range.contains(&at))
    }

    /// The tokens outside test code, with their places.
    pub fn production(&self) -> impl Iterator<Item = (usize, &Token<'a>)> {
        self.tokens.iter().enumerate().filter(|(at, _)| !self.is_test(*at))
    }

    /// Whether the tokens from `at` on read as `words`.
    pub fn reads(&self, at: usize, words: &[&str]) -> bool {
        self.tokens.len() >= at + words.len() && words.iter().zip(&self.tokens[at..]).all(|(w, t)| t.is(w))
    }

    /// Lines, comments and blanks included, that test code takes.
    pub fn test_lines(&self) -> usize {
        let mut last = 0;
        let mut count = 0;
        for range in &self.test_tokens {
            let (from, to) = (self.tokens[*range.start()].line, self.tokens[*range.end()].last_line);
            count += (to + 1).saturating_sub(from.max(last + 1));
            last = last.max(to);
        }
        count
    }

    /// Lines that bear code: (production, test). Comments and blank lines are neither.
    pub fn code_lines(&self) -> (usize, usize) {
        let (mut counts, mut last) = ([0, 0], 0);
        for (at, token) in self.tokens.iter().enumerate() {
            counts[usize::from(self.is_test(at))] +=
                (token.last_line + 1).saturating_sub(token.line.max(last + 1));
            last = last.max(token.last_line);
        }
        (counts[0], counts[1])
    }

    /// Every function, nested ones included.
    pub fn functions(&self) -> Vec<Function> {
        let foreign = self.trait_impls();
        (0..self.tokens.len()).filter_map(|at| self.function(at, &foreign)).collect()
    }

    fn function(&self, at: usize, foreign: &[RangeInclusive<usize>]) -> Option<Function> {
        let name = self.tokens.get(at + 1).filter(|t| self.tokens[at].is("fn") && t.kind == Kind::Word)?;
        let open = self.after_generics(at + 2);
        let last = end_of_item(&self.tokens, at);
        Some(Function {
            name: name.text.to_owned(),
            line: self.tokens[at].line,
            last_line: self.tokens[last].last_line,
            parameters: self.parameters(open),
            of_a_trait: foreign.iter().any(|range| range.contains(&at)),
            test: self.is_test(at),
        })
    }

    /// The place after `<...>` if there is one at `at`, else `at`.
    pub fn after_generics(&self, at: usize) -> usize {
        if !self.reads(at, &["<"]) {
            return at;
        }
        let mut depth = 0;
        for place in at..self.tokens.len() {
            depth += self.angle(place);
            if depth == 0 {
                return place + 1;
            }
        }
        self.tokens.len()
    }

    /// +1 for an opening angle, -1 for a closing one; the head of an arrow is neither.
    fn angle(&self, at: usize) -> i32 {
        let arrow = at > 0 && (self.tokens[at - 1].is("-") || self.tokens[at - 1].is("="));
        match self.tokens[at].text {
            "<" => 1,
            ">" if !arrow => -1,
            _ => 0,
        }
    }

    /// Parameters between the parenthesis at `open` and its partner.
    fn parameters(&self, open: usize) -> usize {
        let (mut depth, mut count, mut empty) = (0, 0, true);
        for at in open..self.tokens.len() {
            let token = &self.tokens[at];
            depth += nesting(token) + self.angle(at);
            if depth == 0 {
                break;
            }
            if depth == 1 && token.is(",") {
                (count, empty) = (count + 1, true);
            } else if at > open {
                empty = false;
            }
        }
        count + usize::from(!empty)
    }

    /// Token ranges of `impl Trait for Type { ... }`.
    fn trait_impls(&self) -> Vec<RangeInclusive<usize>> {
        let item =
            |at: usize| at == 0 || ["{", "}", ";", "]", "unsafe"].iter().any(|t| self.tokens[at - 1].is(t));
        (0..self.tokens.len())
            .filter(|&at| self.tokens[at].is("impl") && item(at))
            .filter_map(|at| {
                let open = at + self.tokens[at..].iter().position(|t| t.is("{"))?;
                let bound = |place: usize| self.reads(place, &["for", "<"]);
                let of_trait = (at..open).any(|place| self.tokens[place].is("for") && !bound(place));
                of_trait.then(|| open..=end_of_item(&self.tokens, at))
            })
            .collect()
    }

    /// Every named type.
    pub fn types(&self) -> Vec<TypeName> {
        let keyword = |t: &Token<'_>| ["struct", "enum", "trait", "union", "type"].iter().any(|k| t.is(k));
        let named = self.tokens.windows(2).filter(|w| keyword(&w[0]) && w[1].kind == Kind::Word);
        named.map(|w| TypeName { name: w[1].text.to_owned(), line: w[1].line }).collect()
    }

    /// Every module whose body is in another file.
    pub fn modules(&self) -> Vec<Module> {
        let mut around: Vec<(usize, String)> = Vec::new();
        let mut found = Vec::new();
        for at in 0..self.tokens.len() {
            around.retain(|(end, _)| *end >= at);
            let Some(name) = self.tokens.get(at + 1).filter(|_| self.tokens[at].is("mod")) else { continue };
            let name = name.text.trim_start_matches("r#").to_owned();
            if self.reads(at + 2, &["{"]) {
                around.push((end_of_item(&self.tokens, at), name));
            } else if self.reads(at + 2, &[";"]) {
                let inside = around.iter().map(|(_, name)| name.clone()).collect();
                found.push(Module { name, inside, path: self.path_attribute(at), test: self.is_test(at) });
            }
        }
        found
    }

    /// The value of a path attribute among the attributes before the item at `at`.
    fn path_attribute(&self, at: usize) -> Option<String> {
        let start =
            self.tokens[..at].iter().rposition(|t| t.is(";") || t.is("}") || t.is("{")).map_or(0, |p| p + 1);
        let key = (start..at).find(|&p| self.reads(p, &["#", "[", "path", "="]))?;
        Some(self.tokens.get(key + 4)?.text.trim_matches('"').to_owned())
    }
}

/// +1 for an opening bracket of any sort, -1 for a closing one.
fn nesting(token: &Token<'_>) -> i32 {
    match token.text {
        "(" | "[" | "{" => 1,
        ")" | "]" | "}" => -1,
        _ => 0,
    }
}

/// The last token of the item that starts at `at`: the brace that closes its body, or its semicolon.
pub fn end_of_item(tokens: &[Token<'_>], at: usize) -> usize {
    let mut depth = 0;
    for (place, token) in tokens.iter().enumerate().skip(at) {
        depth += nesting(token);
        let body_closed = token.is("}") && depth <= 0;
        if body_closed || (token.is(";") && depth == 0) {
            return place;
        }
    }
    tokens.len().saturating_sub(1)
}

/// Token ranges, attribute included, of what only tests compile.
fn test_ranges(tokens: &[Token<'_>]) -> Vec<RangeInclusive<usize>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let Some((close, inner)) =
            attribute(tokens, at).filter(|(close, _)| is_test_attribute(tokens, at, *close))
        else {
            at += 1;
            continue;
        };
        let last =
            if inner { tokens.len() - 1 } else { end_of_item(tokens, after_attributes(tokens, close + 1)) };
        ranges.push(at..=last);
        at = last + 1;
    }
    ranges
}

/// The closing bracket of the attribute at `at`, and whether it is an inner one.
pub fn attribute(tokens: &[Token<'_>], at: usize) -> Option<(usize, bool)> {
    let inner = tokens.get(at + 1).is_some_and(|t| t.is("!"));
    let open = at + 1 + usize::from(inner);
    if !tokens[at].is("#") || !tokens.get(open)?.is("[") {
        return None;
    }
    let mut depth = 0;
    for (place, token) in tokens.iter().enumerate().skip(open) {
        depth += nesting(token);
        if depth == 0 {
            return Some((place, inner));
        }
    }
    None
}

/// The first token at or after `at` that is not part of an attribute.
fn after_attributes(tokens: &[Token<'_>], mut at: usize) -> usize {
    while at < tokens.len() {
        match attribute(tokens, at) {
            Some((close, _)) => at = close + 1,
            None => break,
        }
    }
    at
}

/// Features that only the manifests of tests turn on.
const TEST_FEATURES: &[&str] = &["\"testing\"", "\"faults\""];

/// `#[test]`, `#[any::test]` and `#[cfg(test)]` or `#[cfg(all(test, ..))]`, and what only builds with a feature of tests
/// have; another `any` or a `not` may be in production.
fn is_test_attribute(tokens: &[Token<'_>], at: usize, close: usize) -> bool {
    let words: Vec<&str> =
        tokens[at..close].iter().filter(|t| t.kind == Kind::Word).map(|t| t.text).collect();
    match words.first() {
        Some(&"cfg") if words.contains(&"not") => false,
        Some(&"cfg") => {
            let of_tests = tokens[at..close].iter().any(|t| TEST_FEATURES.contains(&t.text));
            of_tests || words.contains(&"test") && !words.contains(&"any")
        }
        _ => words.last() == Some(&"test") && !tokens[at..close].iter().any(|t| t.is("(")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"
pub fn plain(a: u8, b: &HashMap<K, V>) -> [u8; 4] {
    "}"
}
impl<'a, T: Fn(u8) -> u8> Thing<T> {
    fn generic<F: Fn(A, B) -> C>(&self, f: F, (x, y): (u8, u8),) where F: Copy { fn nested() {} }
}
impl<T> Trait for Thing<T> {
    fn given(&mut self, a: u8) {}
}
trait Ask { fn ask(&self); }
fn takes(run: impl for<'x> Fn(&'x str)) {}
mod a {
    #[path = "elsewhere.rs"]
    pub mod b;
}
#[cfg(test)]
mod probe;
type Short = u8;
#[cfg(test)]
mod tests {
    struct Double;
    #[test]
    fn works() {
    }
}
"#;

    fn named<'a>(all: &'a [Function], name: &str) -> &'a Function {
        all.iter().find(|f| f.name == name).expect("the source declares it")
    }

    #[test]
    fn functions_have_extent_parameters_and_place() {
        let functions = Outline::of(SOURCE).functions();
        assert_eq!(functions.len(), 7);
        let plain = named(&functions, "plain");
        assert_eq!((plain.line, plain.last_line, plain.parameters), (2, 4, 2));
        assert_eq!(named(&functions, "generic").parameters, 3);
        assert_eq!(named(&functions, "nested").parameters, 0);
        assert_eq!(named(&functions, "ask").parameters, 1);
        assert_eq!(named(&functions, "takes").parameters, 1);
        assert!(named(&functions, "given").of_a_trait);
        assert!(!named(&functions, "generic").of_a_trait && !named(&functions, "takes").of_a_trait);
    }

    #[test]
    fn test_code_is_told_from_production() {
        let outline = Outline::of(SOURCE);
        assert!(named(&outline.functions(), "works").test);
        assert!(!named(&outline.functions(), "given").test);
        assert_eq!(outline.test_lines(), 2 + 7);
        assert_eq!(outline.code_lines(), (16, 9));
        let mixed =
            Outline::of("#[cfg(not(test))]\nfn a() {}\n#[cfg(any(test, feature = \"x\"))]\nfn b() {}\n");
        assert_eq!(mixed.test_lines(), 0);
        let feature = Outline::of("#[cfg(any(test, feature = \"testing\"))]\nfn a() {}\nfn b() {}\n");
        assert_eq!(feature.code_lines(), (1, 2));
        assert_eq!(Outline::of("#![cfg(test)]\nfn a() {}\n").code_lines(), (0, 2));
    }

    #[test]
    fn modules_know_their_surroundings() {
        let modules = Outline::of(SOURCE).modules();
        assert_eq!(modules.len(), 2);
        assert_eq!((modules[0].name.as_str(), modules[0].path.as_deref()), ("b", Some("elsewhere.rs")));
        assert_eq!((modules[0].inside.as_slice(), modules[0].test), (["a".to_owned()].as_slice(), false));
        assert_eq!((modules[1].name.as_str(), modules[1].test), ("probe", true));
        assert!(modules[1].inside.is_empty() && modules[1].path.is_none());
    }

    #[test]
    fn types_are_named_with_their_lines() {
        let names: Vec<_> = Outline::of(SOURCE).types().into_iter().map(|t| (t.name, t.line)).collect();
        assert_eq!(names, [("Ask".to_owned(), 11), ("Short".to_owned(), 19), ("Double".to_owned(), 22)]);
    }
}
