//! Licence expressions, evaluated against what we accept.

/// Whether `expression` can be satisfied by licences that `accepts` takes; what is wrong if it cannot be read.
///
/// An `OR` needs one acceptable side, an `AND` both, and `AND` binds tighter. The old `A/B` means `A OR B`. A licence
/// `WITH` an exception is asked for under both words.
pub fn satisfied(expression: &str, accepts: &dyn Fn(&str) -> bool) -> Result<bool, String> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut parser = Parser { words: spaced.split_whitespace().collect(), at: 0, accepts };
    let verdict = parser.any()?;
    match parser.peek() {
        None => Ok(verdict),
        Some(word) => Err(format!("'{word}' stands where the expression should end")),
    }
}

struct Parser<'a> {
    words: Vec<&'a str>,
    at: usize,
    accepts: &'a dyn Fn(&str) -> bool,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.words.get(self.at).copied()
    }

    fn take(&mut self, word: &str) -> bool {
        let there = self.peek() == Some(word);
        self.at += usize::from(there);
        there
    }

    fn any(&mut self) -> Result<bool, String> {
        let mut verdict = self.all()?;
        while self.take("OR") {
            verdict |= self.all()?;
        }
        Ok(verdict)
    }

    fn all(&mut self) -> Result<bool, String> {
        let mut verdict = self.one()?;
        while self.take("AND") {
            verdict &= self.one()?;
        }
        Ok(verdict)
    }

    fn one(&mut self) -> Result<bool, String> {
        if self.take("(") {
            let verdict = self.any()?;
            return if self.take(")") { Ok(verdict) } else { Err("a parenthesis is not closed".to_owned()) };
        }
        let licence = self.name()?;
        if self.take("WITH") {
            let exception = self.name()?;
            return Ok((self.accepts)(&format!("{licence} WITH {exception}")));
        }
        Ok((self.accepts)(licence))
    }

    fn name(&mut self) -> Result<&'a str, String> {
        let word = self.peek().filter(|word| !["AND", "OR", "WITH", "(", ")"].contains(word));
        self.at += 1;
        word.ok_or_else(|| "a licence name is missing".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(expression: &str) -> Result<bool, String> {
        satisfied(expression, &|name| ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].contains(&name))
    }

    #[test]
    fn or_needs_one_side_and_and_needs_both() {
        assert_eq!(judge("MIT"), Ok(true));
        assert_eq!(judge("GPL-3.0-only"), Ok(false));
        assert_eq!(judge("GPL-3.0-only OR MIT"), Ok(true));
        assert_eq!(judge("GPL-3.0-only AND MIT"), Ok(false));
        assert_eq!(judge("MIT AND ISC"), Ok(true));
        assert_eq!(judge("GPL-2.0/MIT"), Ok(true));
    }

    #[test]
    fn and_binds_tighter_than_or_and_parentheses_change_that() {
        assert_eq!(judge("MIT OR ISC AND GPL-3.0-only"), Ok(true));
        assert_eq!(judge("(MIT OR ISC) AND GPL-3.0-only"), Ok(false));
        assert_eq!(judge("(GPL-3.0-only OR ISC) AND MIT"), Ok(true));
    }

    #[test]
    fn an_exception_is_part_of_the_name() {
        assert_eq!(judge("Apache-2.0 WITH LLVM-exception"), Ok(true));
        assert_eq!(judge("Apache-2.0"), Ok(false));
        assert_eq!(judge("MIT WITH LLVM-exception"), Ok(false));
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        for broken in ["", "MIT OR", "(MIT", "MIT ISC", "AND MIT", "MIT)", "MIT WITH"] {
            assert!(judge(broken).is_err(), "{broken:?} was taken as {:?}", judge(broken));
        }
    }
}
