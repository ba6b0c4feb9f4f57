"""What is said: one system text that every reader shares, and three readers with their questions.

The prose is Augustine, Confessions, X, in the translation of E. B. Pusey (1838, public domain), abridged:
the oldest description of a memory hierarchy, evictions included. The questions were written for this demo.
Tokens are bytes (0 to 255) and three marks.
"""

from pathlib import Path

SYSTEM, USER, ANSWER = 256, 257, 258
VOCABULARY_SIZE = 259

SYSTEM_TEXT = (
    "You are a patient companion for readers of old books. Answer from the passage below and from "
    "nothing else, quote it where you can, and say so when it is silent. The passage:\n\n"
) + (Path(__file__).parent / "prose.txt").read_text(encoding="utf-8")

READERS = {
    "anna": (
        "I study philosophy, and I have to give a talk on this passage tomorrow. Before anything else, tell "
        "me how it is built: where does he begin, which pictures of memory does he use one after the other, "
        "and at which word does he turn from what memory holds to what it does when asked for something?",
        "Thank you. Now take the palaces and the inner receptacle. One is wide and open, the other must be "
        "searched. Does he mean two places, or one place seen on a good and on a bad day? Give me the two "
        "sentences that speak most clearly for each reading, so that I can put them side by side on a slide.",
        "Good. One listener will say that a thing which was swallowed up and buried cannot be called a "
        "thing of the memory at all. How would the author answer, if he may use these lines only?",
        "Last question before I sleep: write down, in plain words of today, the order in which things come "
        "when he calls them, and what happens to those that made way.",
        "I am back, and the talk went well. Somebody asked about the things that rush out in troops without "
        "being called. What does he do with them, and with which part of himself?",
    ),
    "boris": (
        "I build storage for a living and a friend sent me this. Humour me and read it as an engineer would. "
        "Something instantly comes, others must be longer sought after, others rush out in troops. How many "
        "tiers is that, what tells them apart, and what would you call the thing which he drives away with "
        "the hand of his heart? A plain list will do, fastest first, with the words of the text beside it.",
        "Then look at the last lines of the first part: those in front make way for the following, and as "
        "they make way they are hidden from sight, ready to come when he wills. To me that is eviction to a "
        "slower tier with a promise to bring it back. What in the text speaks against my reading of it?",
        "Agreed. And all things are preserved distinctly and under general heads, each having entered by its "
        "own gate. Is that an index, or is it only good order? Quote the half-sentence that decides it.",
        "The machine was restarted overnight and I lost my notes, though clearly you did not lose yours. "
        "Remind me what we said about the promise to bring things back.",
        "And again from the start, in one sentence: what is stored, where, and how does he get it back?",
    ),
    "clara": (
        "I translate from English, slowly and with a dictionary. Some words here are older than my "
        "dictionary. What do perchance, forthcoming, avenue and receptacle mean in this passage, and is "
        "there a modern word for each that keeps its tone? Please do not replace them with anything that "
        "smells of an office; my readers are monks, gardeners and one very strict aunt.",
        "The harbour gives me trouble. A harbour receives ships, and ships leave again; but he says that it "
        "has numberless secret and inexpressible windings, which sounds like a cave to me, or like an ear. "
        "Is there a word which can be harbour and cave at once? If not, which of the two may I give up?",
        "I shall keep the harbour. Then he writes her windings, and his own gate. Who is she, and who is he? "
        "In my language a memory is neither, so I have to decide it on the first line and stay with it.",
        "Here is my version of the last sentence, word for word in your language again: all of it goes in, "
        "every thing through its own door, and lies there until it is needed. What did I lose?",
        "My aunt has read it. She asks why he must drive things away at all if memory is so large.",
    ),
}


def system_tokens() -> list[int]:
    """Return the tokens that every conversation begins with."""
    return [SYSTEM, *SYSTEM_TEXT.encode()]


def turn_tokens(text: str) -> list[int]:
    """Return the tokens of one question, up to where the answer begins."""
    return [USER, *text.encode(), ANSWER]
