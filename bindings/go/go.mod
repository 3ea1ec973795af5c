module vmaccel

go 1.19
