// A text to ask about, for those who want to see both phases without having one at hand.

const TEXT = `The lighthouse on the Long Wall was kept by two brothers, Anders and Elias Holm, who had been sailors. Anders was the elder and believed in schedules. Elias was the younger and believed in the weather. For thirty-one years they divided the work: Anders wound the clock that turned the lens, and Elias trimmed the lamp and wrote the log.

The lens came from Paris in nine crates, packed in bran. It weighed as much as a fishing boat and floated in a basin of mercury, so that a child could turn it with one finger. The clock that drove it was wound every three hours, at first by Anders, and later, when his shoulder would no longer do it, by whichever of the two was awake.

The log is kept in the museum. Its entries are short: "Wind south-west, strong. Beam even." On the second of October 1893 there is a longer one, in the hand of Elias: "The beam was late tonight. A ship asked by signal whether we slept. We did not. The clock stood for eleven minutes, because a moth had gone into the second wheel. Anders has taken it apart and put it together again, and no parts are left over. I have told the ship that the moth is dead."

After that night one of them always counted the turns, for the first hour after dusk, against a sand-glass. The count is in the log for every night until the electric motor came: 180, 180, 181, 180. In the margin of the last page Elias wrote that the motor was very even, and that he did not know what to do with the evenings.`;

export const EXAMPLE = { question: "What does this text say about the two brothers?", file: { name: "lighthouse.txt", text: TEXT } };
