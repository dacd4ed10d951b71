//! The declarations of a source, item by item, with the names that each item mentions.

use crate::lex::{Kind, Token};
use crate::outline::{Outline, attribute, end_of_item};
use std::collections::BTreeSet;

/// Names that an item mentions.
pub type Names<'a> = BTreeSet<&'a str>;

/// Attributes of what is called from outside Rust.
const CALLED_FROM_OUTSIDE: &[&str] =
    &["pyfunction", "pymodule", "pyclass", "pymethods", "no_mangle", "export_name", "global_allocator"];
/// Keywords before an item's own, and those that begin one with a name.
const BEFORE: &[&str] = &["unsafe", "async", "default", "auto"];
const NAMED: &[&str] = &["fn", "struct", "enum", "union", "trait", "type", "const", "static"];

/// One item with a name.
#[derive(Debug)]
pub struct Item<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its line.
    pub line: usize,
    /// Whether it is plainly `pub`; what is not is the compiler's to judge.
    pub public: bool,
    /// Whether it is a type or a trait.
    pub is_type: bool,
    /// The names that it mentions.
    pub mentions: Names<'a>,
}

/// One `impl Trait for Type`.
#[derive(Debug)]
pub struct OfTrait<'a> {
    /// The words of the type, and of the trait.
    pub of: Vec<&'a str>,
    /// The names that it mentions.
    pub mentions: Names<'a>,
}

/// The production items of one source.
#[derive(Debug, Default)]
pub struct ItemList<'a> {
    /// Items at the top, in inline modules and in inherent implementations.
    pub items: Vec<Item<'a>>,
    /// Implementations of traits.
    pub of_traits: Vec<OfTrait<'a>>,
    /// Names mentioned outside any searched item: by `main`, by functions called from outside, by macros between
    /// items.
    pub roots: Names<'a>,
}

impl<'a> ItemList<'a> {
    /// Reads a source.
    pub fn of(outline: &Outline<'a>) -> Self {
        let mut found = Self::default();
        Walk { outline, found: &mut found }.run(0, outline.tokens.len());
        found
    }
}

/// The tokens before an item.
#[derive(Default)]
struct ItemPrefix<'a> {
    names: Names<'a>,
    public: bool,
}

struct Walk<'w, 'a> {
    outline: &'w Outline<'a>,
    found: &'w mut ItemList<'a>,
}

impl<'a> Walk<'_, 'a> {
    fn token(&self, at: usize) -> Option<&Token<'a>> {
        self.outline.tokens.get(at)
    }

    fn is(&self, at: usize, word: &str) -> bool {
        self.token(at).is_some_and(|token| token.is(word))
    }

    fn is_one_of(&self, at: usize, words: &[&str]) -> bool {
        words.iter().any(|word| self.is(at, word))
    }

    /// The items between two places.
    fn run(&mut self, from: usize, to: usize) {
        let (mut at, mut before) = (from, ItemPrefix::default());
        while at < to {
            if self.outline.is_test(at) {
                at += 1;
            } else if let Some((close, _)) = attribute(&self.outline.tokens, at) {
                before.names.append(&mut self.names(at, close));
                at = close + 1;
            } else if self.is(at, "pub") {
                before.public = !self.is(at + 1, "(");
                at = if before.public { at + 1 } else { self.after_bracket(at + 1) };
            } else if self.is_one_of(at, BEFORE)
                || self.is(at, "const") && self.is_one_of(at + 1, &["fn", "unsafe", "async", "extern"])
            {
                at += 1;
            } else if self.is(at, "extern") && self.is(at + 2, "fn") {
                at += 2;
            } else {
                at = self.item(at, std::mem::take(&mut before)) + 1;
            }
        }
    }

    /// Reads the item that begins at `at`; returns its last token.
    fn item(&mut self, at: usize, before: ItemPrefix<'a>) -> usize {
        let end = end_of_item(&self.outline.tokens, at);
        if self.is(at, "use") {
            self.renames(at, end);
        } else if self.is(at, "mod") {
            if self.is(at + 2, "{") {
                self.run(at + 3, end);
            }
        } else if self.is(at, "impl") {
            self.implementation(at, end, before);
        } else if self.is(at, "macro_rules") {
            self.named(at + 2, end, before);
        } else if self.is_one_of(at, NAMED) {
            self.named(at + 1 + usize::from(self.is(at + 1, "mut")), end, before);
        } else {
            self.found.roots.append(&mut self.names(at, at));
            return at;
        }
        end
    }

    fn named(&mut self, at: usize, end: usize, mut before: ItemPrefix<'a>) {
        let Some(&Token { text, line, .. }) = self.token(at) else { return };
        let (name, is_fn) = (text.trim_start_matches("r#"), self.is(at - 1, "fn"));
        let outside = before.names.iter().any(|name| CALLED_FROM_OUTSIDE.contains(name));
        let mut mentions = self.names(at + 1, end);
        mentions.append(&mut before.names);
        if outside || name == "_" || is_fn && name == "main" {
            self.found.roots.insert(name);
            self.found.roots.extend(&mentions);
        }
        let is_type = self.is_one_of(at - 1, &["struct", "enum", "union", "trait", "type"]);
        self.found.items.push(Item { name, line, public: before.public, is_type, mentions });
    }

    /// `A as B` makes another name for `A`; else an import is no use of anything.
    fn renames(&mut self, at: usize, end: usize) {
        for place in at + 1..end {
            if let (true, Some(from), Some(to)) =
                (self.is(place, "as"), self.token(place - 1), self.token(place + 1))
                && to.text != "_"
            {
                let (name, line) = (to.text, to.line);
                let mentions = Names::from([from.text]);
                self.found.items.push(Item { name, line, public: false, is_type: false, mentions });
            }
        }
    }

    fn implementation(&mut self, at: usize, end: usize, before: ItemPrefix<'a>) {
        let open = (at..end).find(|&place| self.is(place, "{")).unwrap_or(end);
        if before.names.iter().any(|name| CALLED_FROM_OUTSIDE.contains(name)) {
            return self.found.roots.append(&mut self.names(at, end));
        }
        let start = self.outline.after_generics(at + 1);
        let bound = |place: usize| self.is(place + 1, "<");
        let Some(split) = (start..open).find(|&place| self.is(place, "for") && !bound(place)) else {
            return self.run(open + 1, end);
        };
        let whole = (split..open).find(|&place| self.is(place, "where")).unwrap_or(open);
        let words = |from: usize, to: usize| {
            let words = self.outline.tokens[from..to].iter().filter(|token| token.kind == Kind::Word);
            words.map(|token| token.text).collect::<Vec<_>>()
        };
        let of = [words(split + 1, whole), words(start, split).into_iter().rev().collect()].concat();
        self.found.of_traits.push(OfTrait { of, mentions: self.names(at, end) });
    }

    /// The names in the tokens from `from` to `to`, both included, less those of test code.
    fn names(&self, from: usize, to: usize) -> Names<'a> {
        let mut names = Names::new();
        for (at, token) in self.outline.tokens.iter().enumerate().take(to + 1).skip(from) {
            match token.kind {
                _ if self.outline.is_test(at) => {}
                Kind::Word => _ = names.insert(token.text.trim_start_matches("r#")),
                // Names in attributes, such as serde's, and in format strings.
                Kind::Literal if self.is(at.wrapping_sub(1), "=") => names.extend(words_of(token.text)),
                Kind::Literal => names.extend(token.text.split('{').skip(1).filter_map(first_word)),
                Kind::Lifetime | Kind::Mark => {}
            }
        }
        names
    }

    /// The place after the bracket that opens at `at`.
    fn after_bracket(&self, at: usize) -> usize {
        (at..self.outline.tokens.len()).find(|&place| self.is(place, ")")).map_or(at, |place| place + 1)
    }
}

fn words_of(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c != '_' && !c.is_alphanumeric()).filter(|word| !word.is_empty())
}

fn first_word(text: &str) -> Option<&str> {
    let end = text.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(text.len());
    Some(&text[..end]).filter(|word| !word.is_empty())
}
