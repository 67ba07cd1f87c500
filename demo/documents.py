"""What is fed to the model: one beginning that all texts share, and five different endings."""

SHARED_PREFIX = """
You are the assistant of a small museum of technology. Visitors ask you about the things on show,
and you answer from the pages that follow this introduction. Keep to what the pages say. Where
they are silent, tell the visitor so and do not guess; a plain "the label does not mention it" is
a good answer. Write in short sentences, in the language of the question, and explain every
technical word the first time it comes up. Children visit on weekday mornings, so never assume
that a reader has seen the inside of a machine before.

When a visitor asks for the way, remember that the museum has two floors. The ground floor holds
instruments for measuring: clocks, scales, thermometers and the tide gauge by the window. The
upper floor holds machines that move: the loom, the letter press, the two steam engines and the
lift itself, which is the oldest working one in town. The cafe is in the courtyard and closes an
hour before the galleries do. Tickets are valid for the whole day, and people may leave and come
back.

If somebody reports that an exhibit has stopped, thank them, say that the workshop will be told,
and offer another exhibit near by. Do not promise a time for the repair. Here is the page to
answer from.
"""

DOCUMENTS = {
    "tide gauge": """
The tide gauge by the window drew the height of the harbour water for ninety-one years. A copper
float the size of a bucket lay in a well beneath the floor, joined to the sea by a narrow pipe.
The pipe is the clever part. Waves come and go within seconds, and the pipe lets so little water
through that the well never notices them; the tide takes six hours, and the well follows it
faithfully. From the float a wire ran over a wheel to a pencil, and a clock turned a drum of paper
under the pencil once a day. Every Monday the harbour master took the sheet off, wrote the date on
it and pinned up a new one. When the drum was opened for cleaning, the restorers found a sheet
from a January night on which the line leaves the paper altogether. The sea had risen above the
quay. Below the gap somebody noted in a careful hand that the watch had moved the lamps upstairs
and that nobody was hurt. Modern gauges measure the same height with a radar beam and send it by
radio every minute, but they are still mounted above a well with a narrow pipe, for the same
reason as before.
""",
    "loom": """
The loom on the upper floor weaves ribbons, sixteen at a time. Each ribbon has its own small
shuttle, a wooden boat that carries the thread from one side to the other, and all sixteen are
driven by one toothed bar. What the pattern shall be is told to the machine by a chain of
cardboard cards. A card has holes in it; above the threads hang needles, and where a needle finds
a hole it drops through and its thread stays down, while the others are lifted. One card stands
for one passage of the shuttle. The rose that hangs in the frame beside the loom took two thousand
one hundred and forty cards, and the lady who punched them needed five weeks. Visitors like to
hear that a wrong hole could be mended with a paper patch, and that patched cards were sold at
half price to beginners. The loom runs on Saturdays at three. Please keep long sleeves and scarves
behind the rail. It is loud, and the guide will hand out ear protectors to everybody who wants
them. The ribbons made during the show may be taken home; the colours depend on what thread was
given to us that month.
""",
    "letter press": """
Our letter press printed the town's newspaper until the owner's grandson bought a machine that set
lines of type by itself. Before that, four compositors stood at sloping cases and picked up every
letter by hand, upside down and from left to right, at about fifteen hundred letters an hour. The
large compartments in the lower case are for the letters that a language uses most, which is why
the box of the letter e is under your hand and that of the letter z is at the far edge. Capital
letters lay in the upper case, and English still calls them after it. A finished page was tied
with string, locked in an iron frame with wedges, inked with a roller and pressed once to make a
proof. The proof reader's desk stands next to the press, with its green lamp. In the drawer we
found a list of errors that had slipped through, kept by the man himself for thirty years: a mayor
who had been baked instead of backed, and a circus that promised three loins. Visitors may set
their own name in wooden type and print it on a postcard; the ink needs an hour to dry, so do it
before you go to the cafe.
""",
    "steam engine": """
The smaller of the two steam engines pumped water out of a slate quarry. Its boiler was heated
with whatever there was, mostly peat, and a boy was paid to watch the glass tube on its side that
shows how high the water stands. Too low, and the metal burns through; too high, and water is
thrown into the cylinder and breaks it. The two heavy balls that turn above the fly wheel are the
governor. If the engine runs faster they swing outwards, and by a lever they close the valve that
lets the steam in; if it runs slower they sink, and the valve opens. Nobody has to stand there and
decide. The engine holds its own speed, and it was for such governors that people first worked out
with pen and paper why some machines settle down and others swing to and fro for ever. The quarry
closed when the slate ran out. The pump was forgotten below, and by the time the museum heard of
it, the water had reached the rim. Divers fastened the ropes. What you see is the original iron,
except for the wooden cladding, which had been eaten by a small crab that is not otherwise known
from fresh water.
""",
    "thermometers": """
The long case in the middle room holds forty thermometers, and no two of them agree about what a
degree is. In the early days each maker chose two points that he could find again, such as melting
ice and the warmth of a healthy person, and cut the space between them into as many steps as he
liked. A traveller had to know whose thermometer he was reading. One of ours counts downwards, so
that boiling water stands at zero; its owner, a gardener, found that sensible, since what he
feared was frost, and frost had the large numbers. The glass ones are filled with mercury or with
coloured spirit. Mercury is the more even of the two, but it freezes in a hard winter, and
expeditions to the north carried spirit for that reason. Look for the one with two small pins in
the tube, each with a hair for a spring. The liquid pushes the pins and leaves them behind when it
goes back, so that in the morning you can read how cold the night has been and how warm the day
before it. A magnet brings them back. All forty were read together once, for a bet, on a mild day
in spring; the answers are on the label.
""",
}
